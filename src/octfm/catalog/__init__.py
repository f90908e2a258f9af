"""From a folder of files to a table: one row per acquisition, one reason per rejected file."""
