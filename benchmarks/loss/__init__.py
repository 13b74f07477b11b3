"""What codecs, lateness, bottlenecks and local steps cost in loss, measured in trainings."""
