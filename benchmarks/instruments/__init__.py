"""Real programs of the project with some methods wrapped: counted, recorded, or slower."""
