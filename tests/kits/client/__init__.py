"""Parts of a volunteer for tests of the client."""
