"""Conversations for supervised fine-tuning, encoded with the chat template of a tokenizer."""

from lightning_megatron.tasks.chat.chat_datamodule import ChatDataModule as ChatDataModule
from lightning_megatron.tasks.chat.chat_template import ChatTokenizer as ChatTokenizer
from lightning_megatron.tasks.chat.conversation_datamodule import (
    ConversationDataModule as ConversationDataModule,
)
from lightning_megatron.tasks.chat.conversation_datamodule import (
    ConversationEncoder as ConversationEncoder,
)
from lightning_megatron.tasks.chat.conversations import REMEDY as REMEDY
from lightning_megatron.tasks.chat.conversations import Conversation as Conversation
from lightning_megatron.tasks.chat.conversations import Message as Message
from lightning_megatron.tasks.chat.conversations import messages_of as messages_of
from lightning_megatron.tasks.chat.conversations import side_of as side_of
from lightning_megatron.tasks.chat.conversations import tools_of as tools_of
