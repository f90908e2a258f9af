"""One self-contained page that says what was run and what came out; never imports torch."""
