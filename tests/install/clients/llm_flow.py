"""Simon Willison's llm, by its command line and extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
from pathlib import Path

asked = json.loads(sys.argv[1])
home = Path(os.environ["LLM_USER_PATH"])
home.mkdir(exist_ok=True)
(home / "extra-openai-models.yaml").write_text(f"""
- model_id: tiny-chat
  model_name: tiny
  api_base: {asked["url"]}/v1
- model_id: tiny-text
  model_name: tiny
  api_base: {asked["url"]}/v1
  completion: true
""")


def llm(*arguments):
    command = [str(Path(sys.executable).parent / "llm"), *arguments, "--key", "none", "-o", "temperature", "0"]
    command += ["-o", "max_tokens", str(asked["max_tokens"])]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.removesuffix("\n")


system, user = (m["content"] for m in asked["messages"])
chat, text = ("-m", "tiny-chat", "-s", system, user), ("-m", "tiny-text", asked["prompt"])
said = {
    "chat": llm(*chat, "--no-stream"),
    "chat_streamed": llm(*chat),
    "text": llm(*text, "--no-stream"),
    "text_streamed": llm(*text),
}
print(json.dumps(said))
