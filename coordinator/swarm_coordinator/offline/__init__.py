"""Work on a whole model in one process: the reference, export, sampling, the loss plot."""
