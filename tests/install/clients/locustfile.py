"""locust: users who ask for chats, whole and streamed, and read all of them."""

from locust import HttpUser, constant, task

BODY = {"messages": [{"role": "user", "content": "How do you do?"}], "max_tokens": 8}


class User(HttpUser):
    wait_time = constant(0)

    @task
    def whole(self):
        self.client.post("/v1/chat/completions", json=BODY, name="whole")

    @task
    def streamed(self):
        body = BODY | {"stream": True}
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True, name="streamed"
        ) as answer:
            (*_, end) = [line for line in answer.iter_lines() if line]
            if end != b"data: [DONE]":
                answer.failure(f"a stream ended with {end!r}")
