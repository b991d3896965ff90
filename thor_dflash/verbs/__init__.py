"""What the command line does, one file a verb. Each imports its floor when it runs."""
