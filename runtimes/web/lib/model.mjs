/** A bundle's graphs on one provider, and its tokenizer. */

import { DecodeGraphs } from './decode_graphs.mjs';
import { LimitError, NotRunError, PlacementError } from './errors.mjs';
import { generate } from './generation.mjs';
import { WEIGHTLESS, checkGraph } from './graph_interface.mjs';
import { readGraph } from './onnx_graph.mjs';
import { problemOf } from './placement.mjs';
import { TextCodec } from './text.mjs';

const COPIES = 3; // of the weights, where graphs cannot share them: forward, step, and extend once a text is long

/**
 * What computes, as `engine_node.mjs` and `engine_browser.mjs` make it.
 * @typedef {object} Engine
 * @property {import('./session.mjs').Ort} ort
 * @property {string} ep as it was asked for
 * @property {string} title for people
 * @property {number} threads
 * @property {string} level tolerance level that it is held to
 * @property {boolean} resident its sessions keep the decode state where they compute
 * @property {string | null} adapter the GPU's name
 * @property {Record<string, string>} settings options that were applied
 * @property {string} [note] what a reader of a report should know besides
 * @property {Record<string, string>} versions of the runtime's packages
 * @property {Record<string, string>} machine what a reader of a report needs to know of it
 * @property {number | undefined} bytes memory in all
 * @property {number | undefined} bufferBytes of the largest tensor
 * @property {(bundle: import('./bundle.mjs').Bundle, graph: string, parsed: import('./onnx_graph.mjs').Graph) => Promise<Opened>} open
 *
 * @typedef {{session: import('./session.mjs').Session, placement: import('./placement.mjs').Placement | null}} Opened
 */

export class Model {
  /**
   * @param {import('./bundle.mjs').Bundle} bundle
   * @param {Engine} engine
   * @param {{Tokenizer?: any, allowFallback?: boolean}} [options]
   */
  constructor(bundle, engine, options = {}) {
    this.bundle = bundle;
    this.engine = engine;
    this.options = options;
    /** @type {Record<string, import('./placement.mjs').Placement>} of each graph that was loaded and whose runtime tells */
    this.placements = {};
    const weights = bundle.manifest.weights.reduce((sum, name) => sum + bundle.manifest.files[name].bytes, 0);
    // A copy of the weights for each graph that reads them, or one that is on its way to the device.
    const left = engine.bytes === undefined ? undefined : engine.bytes - (engine.resident ? 1 : COPIES) * weights;
    if (left !== undefined && left <= 0) {
      throw new LimitError(
        `the weights have ${(weights / 1e9).toFixed(1)} GB, and ${engine.title} has ${((engine.bytes ?? 0) / 1e9).toFixed(1)} GB for ${engine.resident ? 'one copy' : `${COPIES} copies`} and all ` +
          `the rest; use a bundle in fewer bits (caracal quantize), or a server`,
      );
    }
    this.graphs = new DecodeGraphs(bundle.manifest, (graph) => this.#open(graph), {
      resident: engine.resident,
      memory: () => ({ bytes: left, bufferBytes: engine.bufferBytes }),
    });
    /** @type {TextCodec | null | undefined} */
    this.loadedCodec = undefined;
  }

  /** The tokenizer; null where the bundle has none. */
  async codec() {
    if (this.loadedCodec === undefined) {
      const { tokenizer, model } = this.bundle.manifest;
      if (tokenizer !== null && !this.options.Tokenizer)
        throw new NotRunError('text needs the package @huggingface/tokenizers; install it, or work with token ids');
      const bytes = tokenizer === null ? null : await this.bundle.read(tokenizer);
      this.loadedCodec =
        bytes && new TextCodec(this.options.Tokenizer, bytes, /** @type {string} */ (tokenizer), model.vocabSize);
    }
    return this.loadedCodec;
  }

  /**
   * Continues prompts, see `generate` of generation.mjs.
   * @param {(string | number[])[]} prompts
   * @param {import('./generation.mjs').GenerateOptions} [options]
   */
  async generate(prompts, options) {
    const text =
      prompts.some((prompt) => typeof prompt === 'string') ||
      (options?.stop?.length ?? 0) > 0 ||
      options?.onText !== undefined;
    const codec = text || this.options.Tokenizer ? await this.codec() : null;
    return generate(this.graphs, codec, prompts, options);
  }

  /** Loads all graphs that are going to run, one after the other: two that load at once would need twice the memory. */
  async load() {
    for (const graph of this.graphs.used) await this.graphs.session(graph);
  }

  async release() {
    await this.graphs.release();
  }

  /** @param {string} graph */
  async #open(graph) {
    if (!WEIGHTLESS.includes(graph)) await this.bundle.weights();
    const spec = this.bundle.manifest.graphs[graph];
    const parsed = readGraph(await this.bundle.read(spec.file), spec.file);
    checkGraph(spec, parsed, this.bundle.manifest.weights);
    const { session, placement } = await this.engine.open(this.bundle, graph, parsed);
    if (placement) {
      this.placements[graph] = placement;
      const problem = problemOf(placement);
      if (problem && !this.options.allowFallback) {
        await session.release();
        throw new PlacementError(
          `asked for ${this.engine.ep}, but ${problem} (${session.name}); allow it, or use another provider`,
        );
      }
    }
    return session;
  }
}
