"""Know adapters: the small tensors that are trained beside a model that stays as it is. By names and shapes alone."""
