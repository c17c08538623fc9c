"""huggingface_hub's InferenceClient with pictures, against a model that names what is in them."""

from huggingface_hub import InferenceClient

from tests.clients.seeing.pictures import URL, check_answers, check_example


def test_pictures() -> None:
    with InferenceClient(URL, timeout=60) as client:
        check_answers(
            lambda chat: client.chat_completion(chat, temperature=0, max_tokens=12).choices[0].message.content
        )


def test_the_example_of_the_docs() -> None:
    check_example("huggingface_hub")
