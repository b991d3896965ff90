"""x"""


def run(args, config, progress):
    return 0
