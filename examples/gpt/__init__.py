"""The parts of train_gpt.py: model, data, checkpoints, training, report."""
