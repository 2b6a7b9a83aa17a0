"""What a checkpoint contains under the names that the user works with, and the steps that change it."""
