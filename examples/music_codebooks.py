"""Tokens of several codebooks: a token is a frame of four voices, a prompt (frames, 4), a step's output (batch, 4).

The model sings a round. The first voice goes on with the tune that its last 16 frames are from; every other voice
sings what the voice before it sang 16 frames ago. A piece ends with the first frame that is silence in all four
voices: the stop token. Served: `hibachi serve music_codebooks.py:Round`, and served_client.py asks.
"""

import numpy as np

import hibachi

PITCHES = ".CDEFGAg"  # 0 is silence, g the G below
BARS = ["CCDDEECC", "EEFFGGGG", "GAGFEECC", "CCggCCCC"]  # "Frère Jacques", in eighths
TUNE = [PITCHES.index(p) for bar in BARS for p in bar * 2]
LATER = 16
SILENCE = np.zeros(4, np.int64)


class Round:
    token, stop_token, max_model_len = SILENCE, SILENCE, 256  # where it is opened by its name: hibachi serve, run-batch

    def __init__(self, tune=TUNE):
        known = np.concatenate([np.zeros(LATER, np.int64), tune])
        self.windows = np.stack([known[i : i + LATER] for i in range(1, len(tune))])
        self.next = known[LATER + 1 :]

    def forward(self, tokens):  # (B, S, 4) -> (B, 4)
        past = np.pad(tokens, ((0, 0), (LATER, 0), (0, 0)))[:, -LATER:]
        same = (past[:, None, :, 0] == self.windows).all(-1)  # (B, places of the tune)
        first = np.where(same.any(-1), self.next[same.argmax(-1)], 0)
        return np.column_stack([first, past[:, 0, :3]])


def show(frames, width=56):
    for start in range(0, len(frames), width):
        for voice in range(4):
            print("  " + "".join(PITCHES[p] for p in frames[start : start + width, voice]))
        print()


def main():
    beginning = np.array([[TUNE[0], 0, 0, 0]])  # one frame, the first note in the first voice
    with hibachi.AutoregressiveBatchInference(Round(TUNE), stop_token=SILENCE, max_model_len=256) as engine:
        piece = np.concatenate([beginning, engine.run(beginning, include_stop=False).collect()])
        print(f"{len(piece)} frames from 1:")
        show(piece)
        lengths = (1, 8, 40, 41, 100)  # the same piece, taken up at five places at once
        streams = [engine.run(piece[:n], include_stop=False) for n in lengths]
        ends = [np.array_equal(np.array(s.collect()), piece[n:]) for n, s in zip(lengths, streams, strict=True)]
        print(f"taken up at frames {', '.join(map(str, lengths))}: {sum(ends)} of {len(ends)} end alike")


if __name__ == "__main__":
    main()
