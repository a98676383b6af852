"""The command line, ``qmoe-ep``: one file per command, imported when the command is used."""
