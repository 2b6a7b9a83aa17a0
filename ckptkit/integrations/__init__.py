"""Put ckptkit into the training loops of other libraries. Each is imported by its name, and needs that library."""
