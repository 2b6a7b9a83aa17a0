"""Use ckptkit in the training loops of other libraries. Each module is named after its library and requires it."""
