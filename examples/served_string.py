"""Sound in, sound out: `hibachi serve served_string.py:String`

    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: audio/wav" -H "Accept: audio/wav" \\
        --data-binary @noise.wav -o string.wav

A plucked string (Karplus and Strong 1983): each sample is the mean of two samples, those 80 and 81 places before, a
little quieter. A token is a frame of 80 samples, so a prompt of noise sounds on as a note of 100 Hz until it is silent.
"""

import io
import wave

import numpy as np

RATE, FRAME = 8000, 80  # samples in a second, and in a token
QUIETER, SILENT = 0.98, 0.02


class String:
    token, max_model_len = np.zeros(FRAME, np.float32), 1000

    def forward(self, tokens):  # (B, S, FRAME) -> (B, FRAME)
        past = np.pad(tokens[:, -2:].reshape(len(tokens), -1), ((0, 0), (1, 0)))[:, -FRAME - 1 :]
        return QUIETER * (past[:, 1:] + past[:, :-1]) / 2

    def stop_rule(self, frames):  # (B, FRAME) -> (B,)
        return abs(frames).max(1) < SILENT

    def read(self, data, kind):  # the body of a request and its type -> (S, FRAME)
        try:
            with wave.open(io.BytesIO(data)) as sound:
                form = sound.getframerate(), sound.getnchannels(), sound.getsampwidth()
                samples = sound.readframes(sound.getnframes())
        except (wave.Error, EOFError) as e:
            raise ValueError(f"Expected the bytes of a .wav file; got {len(data)} bytes of {kind}.") from e
        if form != (RATE, 1, 2):
            raise ValueError(f"Expected {RATE} samples a second, 1 channel, 2 bytes a sample; got {form}.")
        samples = np.frombuffer(samples, "<i2").astype(np.float32) / 2**15
        return np.pad(samples, (0, -len(samples) % FRAME)).reshape(-1, FRAME)

    def write(self, tokens):  # (S, FRAME) -> the body of the answer and its type
        out = io.BytesIO()
        with wave.open(out, "wb") as sound:
            sound.setframerate(RATE)
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.writeframes((np.clip(tokens, -1, 1) * (2**15 - 1)).astype("<i2").tobytes())
        return out.getvalue(), "audio/wav"
