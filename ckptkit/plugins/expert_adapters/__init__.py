"""Write an adapter's expert matrices in another form, for `--experts` and a merge: tested with PEFT 0.21."""
