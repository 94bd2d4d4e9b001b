from hibachi.guide.protocol import Guides, Vocabulary


def guides_for(vocabulary: Vocabulary) -> Guides:
    raise NotImplementedError
