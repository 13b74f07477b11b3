"""One stage alone on a device, real or emulated: its speed, its FLOPs and its memory."""
