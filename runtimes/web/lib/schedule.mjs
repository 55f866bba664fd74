/**
 * Which products of tokens a decoder still owes, and by when: integers only, no arrays. docs/decoding.md states the method.
 *
 * The mixing needs, at every position t, the sum of v[i] * g[j] over all pairs of tokens with i + j = t. A pair (i, j) is called by
 * its newer token i and its lag j <= i, and stands for both products. Pairs are counted in three ways, each pair in exactly one:
 * among tokens that were read in one piece, when they were read (SETTLED); a newer token with the first M lags (ALONE), or with as
 * many as its chunk was long; the rest in block products of U = M/2, M, 2M, ... tokens with the lags [2U, 4U).
 */

/** The reach of tokens whose pairs among each other are all counted. */
export const SETTLED = Number.MAX_SAFE_INTEGER;
/** The reach of tokens that were read alone: their pairs with the first M lags are counted when their sum comes up. */
export const ALONE = 0;

/**
 * Pairs of the tokens in `ranges`, which lie in [start, start + size), with the lags [firstLag, firstLag + lags). What they add to
 * positions before `due` is zero or not wanted. Lags from `start` on are tokens of the block itself: there, v of a token in `ranges`
 * is left out of the lags, since the pair is counted by its newer token.
 * @typedef {{start: number, size: number, firstLag: number, lags: number, due: number, ranges: [number, number][]}} Product
 */

/** The bookkeeping of one sequence. */
export class Schedule {
  /**
   * @param {number} lags M, a power of two of at least 2
   * @param {[number, number][]} [spans] (end, reach) of consecutive runs of tokens from position 0 on
   */
  constructor(lags, spans = []) {
    this.lags = lags;
    this.spans = spans.map(([end, reach]) => /** @type {[number, number]} */ ([end, reach]));
  }

  /** Tokens so far. */
  get known() {
    return this.spans.length ? this.spans[this.spans.length - 1][0] : 0;
  }

  /** Whether the first tokens were read one by one, so that also pairs among the first M lags are still owed. */
  get early() {
    return this.spans.length > 0 && this.spans[0][1] === ALONE;
  }

  /**
   * Takes note of `count` more tokens.
   * @param {number} count
   * @param {number} reach
   * @returns {Product[]} of the blocks that they complete
   */
  append(count, reach) {
    const before = this.known;
    const known = before + count;
    const last = this.spans[this.spans.length - 1];
    if (last && last[1] === reach) last[0] = known;
    else this.spans.push([known, reach]);
    const found = [];
    for (const size of this.#sizes(known)) {
      for (let block = Math.max(2, Math.floor(before / size)); block < Math.floor(known / size); block++) {
        const product = this.#product(size, block);
        if (product) found.push(product);
      }
    }
    return found;
  }

  /**
   * Whether a chunk of `count` tokens can be read now: no pair that it needs is waiting for a block to fill. If not, `settle` first.
   * @param {number} count
   */
  mayExtend(count) {
    const known = this.known;
    if (this.alone(known - this.lags).length) return false;
    return this.#sizes(known).every((size) => {
      const block = Math.floor(known / size);
      const waiting = block >= 2 && block * size < known && this.#ranges(block * size, known, 2 * size).length > 0;
      return !waiting || (block + 2) * size >= known + count;
    });
  }

  /**
   * Counts every pair of the tokens so far: afterwards it is as if they had been read in one piece.
   * @returns {Product[]} still owed besides those that were returned before; to be computed before another token is taken
   */
  settle() {
    const known = this.known;
    const found = [];
    for (const size of this.#sizes(known)) {
      const block = Math.floor(known / size);
      const product = block >= 2 && block * size < known ? this.#product(size, block) : null;
      if (product) found.push(product);
    }
    const start = Math.max(0, known - this.lags);
    const ranges = this.alone(start);
    // Apart, so that a pair of two tokens among the lags, of one of them, and of none is each counted by one rule.
    for (const [low, high] of [
      [0, this.lags],
      [this.lags, known],
    ]) {
      const part = ranges.flatMap(([a, b]) =>
        Math.max(a, low) < Math.min(b, high)
          ? [/** @type {[number, number]} */ ([Math.max(a, low), Math.min(b, high)])]
          : [],
      );
      if (part.length) found.push({ start, size: this.lags, firstLag: 0, lags: this.lags, due: known, ranges: part });
    }
    this.spans = [/** @type {[number, number]} */ ([known, SETTLED])];
    return found;
  }

  /**
   * Runs of tokens from `start` on that were read one by one: their pairs with the first lags are still owed.
   * @param {number} start
   */
  alone(start) {
    return this.#ranges(start, this.known, ALONE);
  }

  /** @param {number} known */
  #sizes(known) {
    const sizes = [];
    for (let size = this.lags / 2; 2 * size < known; size *= 2) sizes.push(size);
    return sizes;
  }

  /**
   * @param {number} size
   * @param {number} block
   * @returns {Product | null}
   */
  #product(size, block) {
    const ranges = this.#ranges(block * size, Math.min((block + 1) * size, this.known), 2 * size);
    if (!ranges.length) return null;
    const lags = size * Math.min(2, block - 1); // of the block 3, block 2 knows nothing: their pairs are counted by block 3
    return { start: block * size, size, firstLag: 2 * size, lags, due: (block + 2) * size, ranges };
  }

  /**
   * Runs of tokens within [start, stop) whose own graph counted no more than `reach` lags.
   * @param {number} start
   * @param {number} stop
   * @param {number} reach
   */
  #ranges(start, stop, reach) {
    /** @type {[number, number][]} */
    const found = [];
    let begin = 0;
    for (const [end, own] of this.spans) {
      const low = Math.max(begin, start);
      const high = Math.min(end, stop);
      if (own <= reach && low < high) found.push([low, high]);
      begin = end;
    }
    return found;
  }
}
