"""A run as data: manifest, model shape, stage cut, learning-rate schedule, codec sizes."""
