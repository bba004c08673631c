"""Parts of a worker besides its tasks: start-up, parking, pauses, remote control, events."""
