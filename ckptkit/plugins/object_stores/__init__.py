"""gs:// and az:// with obstore: read, and written to."""
