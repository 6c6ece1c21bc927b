/** What a newcomer can send with one click. The long one has a history that is worth keeping. */
export const STARTERS = [
  { name: "Ask a short question", text: "What is a samovar? Answer in two sentences." },
  {
    name: "Send a long text",
    text: `Read this text, then tell me in one sentence what it is about.

A language model answers a chat by reading the whole conversation first. For every token it reads, each layer computes two vectors, the key and the value, and the attention of all later tokens looks at them again. Engines therefore keep these vectors: this is the KV cache. It is what makes the second token of an answer cheap after the first one was expensive, and it is large. A model of a few billion parameters writes a hundred kilobytes or more for a single token, so that a long conversation takes gigabytes of the memory of a GPU.

People do not type all the time. They read the answer, think, make tea, answer the phone, and come back after two minutes, or after two hours, or tomorrow, or never. While they are away their cache lies in the most expensive memory of the machine and keeps others from being served. An engine that needs the room throws it away. When the person returns, the model has to read everything from the beginning, and the first word of its answer takes seconds instead of a moment.

There is a middle way, and kitchens have known it for a long time. What is needed now stands on the stove; what will be needed soon stands on the shelf beside it; what may be needed this week is in the cellar. A block of the cache that nobody needs just now can move from the memory of the GPU into the main memory of the machine, from there to a fast local disk, and from there into an object store that costs almost nothing. Each step down is cheaper and slower. Each step up takes some time, but far less than computing the same vectors again, at least where the conversation is long enough.

Three questions have to be answered for this to work well. The first is whether loading is really faster than computing: for a short text on a fast device it is not, and then nothing should be moved at all. The second is who will come back, and when: the best place of a block depends on the chance that somebody asks for it in the next minutes. This can be learned from how long earlier visitors stayed away. The third is whether what comes back is right. A block belongs to exactly one beginning of one text, of one model, of one tenant. If a single token before it differs, it is of no use, and it must never be taken for another. So every block has a name made of everything before it, and a checksum that is verified each time it is loaded.

When all of this is in place, a conversation that was cold becomes warm again before the person has finished typing. The machine serves more people with the same memory, and nobody has to wait for a text that was read before to be read once more.`,
  },
];
