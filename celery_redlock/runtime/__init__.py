"""The process around the locks: its clock, threads, greenlets, polling and interrupts."""
