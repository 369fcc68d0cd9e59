"""Fixed parts of an exported script, as the text that they are in it."""

from __future__ import annotations

TRAIN_SUMMARY = "Trains, optimizer step by optimizer step, without end; gives the mean loss of each."
WORKER_ONLY = ("timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")
PARAMETERS = 'parameters = [p for group in optimizer.param_groups for p in group["params"]]'
READY_BATCHES = [
    "# The loader's batches are made by its own sampler or data set, and stay as they are.",
    'batches = {"batch_sampler": given.batch_sampler}',
    "if given.batch_sampler is None:",
    '    batches = {"batch_size": None, "sampler": given.sampler}',
]
DIVIDE = (
    "for parameter in parameters:  # sums were propagated: the mean's gradient is divided once",
    "    if parameter.grad is not None:",
    "        parameter.grad.div_(DIVISOR)",
)
OWN_ARGUMENTS = (
    "arguments = sys.argv[1:]",
    'if __name__ == "__main__":',
    "    del sys.argv[1:]  # a program that is imported may read arguments, and these are not its",
)
MAIN = """
if __name__ == "__main__":
    steps = int(arguments[0]) if arguments else 100
    for step, loss in zip(range(1, steps + 1), train()):
        if step % 10 == 0 or step == steps:  # not each: to read a loss is to wait for the device
            print(f"step {step}: loss {float(loss):.6f}")
"""
LOSS_OF_MODEL = '''
def loss_of_model(model, batch):
    """The loss that the model itself returns: alone, as `.loss`, or in a tuple."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output["loss"]
    if hasattr(output, "loss"):
        return output.loss
    return next(item for item in output if item.numel() == 1 and item.requires_grad)
'''
TO_DEVICE = '''
def to_device(batch, device, non_blocking=False):
    """The batch with every tensor in it on the device, whatever its nesting."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, (tuple, list)):
        items = [to_device(item, device, non_blocking) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, Mapping):
        moved = copy.copy(batch)
        for key, item in batch.items():
            moved[key] = to_device(item, device, non_blocking)
        return moved
    if dataclasses.is_dataclass(batch):
        moved = copy.copy(batch)
        for field in dataclasses.fields(batch):
            item = to_device(getattr(batch, field.name), device, non_blocking)
            object.__setattr__(moved, field.name, item)
        return moved
    return batch
'''
WINDOWS = '''
def windows(loader):
    """The SIZE micro-batches of each optimizer step; the last step of a pass may have fewer."""
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == SIZE:
            yield window
            window = []
    if window and not loader.drop_last:
        yield window
'''
COUNTED = '''
class Counted:
    """A collate function that also tells how many samples went in, to weight the micro-batches of a step."""

    def __init__(self, collate):
        self.collate = collate

    def __call__(self, samples):
        return len(samples), self.collate(samples)
'''
SAMPLES_IN = '''
def samples_in(batch):
    """Samples in a ready batch: the first dimension of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((count for count in map(samples_in, items) if count), 0)
'''
COUNTED_READY = '''
class Counted:
    """A collate function that also tells how many samples went in, to weight the micro-batches of a step."""

    def __init__(self, collate, loader):
        self.collate = collate
        self.ready = loader.batch_sampler is None

    def __call__(self, samples):
        batch = self.collate(samples)
        return samples_in(batch) if self.ready else len(samples), batch
'''
