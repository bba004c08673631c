"""N independent Redis masters, and a connection to each."""
