"""Time, size and error of codecs, between stages and in averaging: `make bench-codecs`."""
