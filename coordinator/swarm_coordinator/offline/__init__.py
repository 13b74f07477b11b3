"""What needs torch: the one-process reference, export, sampling, the loss plot."""
