"""Handle torch.save files of which there are several, with an index that says which tensor is in which."""
