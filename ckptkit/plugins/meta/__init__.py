"""Read Meta's releases of Llama: `consolidated.NN.pth`, a file of torch.save for each tensor-parallel rank."""
