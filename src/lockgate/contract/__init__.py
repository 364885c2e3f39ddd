"""Values that cross a boundary. Pure: no clock, no I/O, nothing of any other lockgate package."""
