"""What crosses between host memory and the memory of a device."""
