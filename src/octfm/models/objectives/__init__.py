"""What pretraining minimises: one file per objective."""
