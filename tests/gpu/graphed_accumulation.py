"""In plain PyTorch: how far gradients accumulated over CUDA graphs are from those of one piece. Prints a number for each
way to get the graphs; `inf` where torch itself refuses. What the parity check says is held against this."""

import sys

import torch

from tests.gpu.programs import GraphedInPieces, perceptron_data, perceptron_model, regression_loss

PIECES = 4


def compiled_model():
    model = perceptron_model()
    model.forward = torch.compile(model.forward, mode="reduce-overhead")
    return model


def gradients(model, pieces):
    for parameter in model.parameters():
        parameter.grad = None
    for batch in pieces:
        torch.compiler.cudagraph_mark_step_begin()
        (regression_loss(model, batch) / len(pieces)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def largest_error(model_fn):
    model, plain = model_fn().cuda(), perceptron_model().cuda()
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    errors = []
    for _, batch in zip(range(3), perceptron_data(), strict=False):
        whole = [part.cuda() for part in batch]
        expected = gradients(plain, [whole])
        try:
            got = gradients(model, list(zip(*(part.chunk(PIECES) for part in whole), strict=True)))
        except RuntimeError:
            return float("inf")
        errors.append(float((got - expected).norm() / expected.norm()))
    return max(errors)


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    print(largest_error({"compiled": compiled_model, "graphed": GraphedInPieces}[sys.argv[1]]))
