"""Cuts of layers into stages."""

TESTS = "tests/partition"
MUTANTS = [
    ("partition/single_stages.py", "max(before, weight) < least):", "before + weight < least):"),
    (
        "partition/single_stages.py",
        "                if limited[end] - limited[start] > limit.most:",
        "                if limited[end] - limited[start] >= limit.most > 0:",
    ),
    ("partition/single_stages.py", "before + weight * weight", "before + weight"),
    (
        "partition/paired_stages.py",
        "range(num_ranks, num_layers - num_ranks + 1)",
        "range(num_ranks, num_layers - num_ranks)",
    ),
    (
        "partition/paired_stages.py",
        "last_a, last_b = first.num_layers - ranks_left, second.num_layers - ranks_left",
        "last_a, last_b = first.num_layers - ranks_left, second.num_layers - ranks_left - 1",
    ),
    (
        "partition/paired_stages.py",
        "limited[a] + problem.most_limited - (second_limited[next_b] - second_limited[b])",
        "limited[a] + problem.most_limited",
    ),
    ("partition/paired_stages.py", "least_weight - weight) - 1 for", "least_weight - weight) for"),
    ("partition/paired_stages.py", "lightest + int(lightest * slack)", "lightest"),
    (
        "partition/paired_stages.py",
        "partial(_Most, stage=cut.heaviest_stage())",
        "partial(_Most, stage=cut.heaviest_rank())",
    ),
    (
        "partition/load.py",
        "return nearest if nearest >= exact else math.nextafter(nearest, math.inf)",
        "return nearest",
    ),
    ("partition/evening.py", "<= heaviest_stage", "<= heaviest_rank"),
    (
        "partition/evening.py",
        "max(limit.load.of_ranks(moved, placement)) <= limit.most",
        "limit.most >= 0",
    ),
    ("partition/memory_limit.py", "base + count * share", "base + share"),
    ("partition/balancing.py", "if max(by_rank) > limit.most:", "if by_rank[0] > limit.most:"),
]
