"""The command line: one file a command, each thin; imports happen when a command runs."""
