"""Times on the current CUDA stream."""
import torch


def median_microseconds(work, repeats, before=lambda: None):
    """Of work(), the median of so many; before() runs ahead of each, untimed."""
    times = []
    for _ in range(repeats):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[repeats // 2]
