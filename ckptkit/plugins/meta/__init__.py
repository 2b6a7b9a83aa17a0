"""Read Meta's releases of Llama: `consolidated.NN.pth`, one torch.save file per tensor-parallel rank."""
