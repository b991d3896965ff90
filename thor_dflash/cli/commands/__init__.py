"""The subcommands of the command line, one per file. Each imports what it needs when it runs."""
