"""What happens to the message of one task: published, received, run, sent again, ended."""
