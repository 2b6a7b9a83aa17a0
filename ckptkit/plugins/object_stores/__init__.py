"""Read and write gs:// and az:// with obstore."""
