"""A user's file that uses the GPU while it is imported."""

import torch

from tests.gpu.programs import perceptron_data, perceptron_model, regression_loss

TABLE = torch.ones(8, device="cuda")

model_fn, data_fn, loss_fn = perceptron_model, perceptron_data, regression_loss
