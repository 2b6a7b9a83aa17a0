"""Hold the files of torch.save, read and written without torch: archives, pickles, storages."""
