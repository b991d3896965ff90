"""The command line: parser, arguments, files, and one module per command."""
