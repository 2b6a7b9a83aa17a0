"""DCP, the directories of torch.distributed.checkpoint."""
