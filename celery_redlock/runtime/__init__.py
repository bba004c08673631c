"""What a process is: its clock, its threads and greenlets, what may interrupt it."""
