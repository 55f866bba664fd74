/** Typed errors of the library. `exitCode` is what a command returns for one, `kind` is what a page may tell them apart by. */

/** Base of everything that is thrown on purpose; the message is a sentence for people. */
export class CaracalError extends Error {
  exitCode = 2;
  kind = 'input';

  /** @param {string} message */
  constructor(message) {
    super(message);
    this.name = new.target.name;
  }
}

/** Bad usage or bad input: the message says what was expected, what was found and what to do. */
export class InputError extends CaracalError {}

/** An input that this machine or the runtime cannot compute rightly, refused before it runs. */
export class LimitError extends InputError {
  kind = 'limit';
}

/** A bundle that is missing, incomplete, altered, or of a format that this version does not read. */
export class BundleError extends InputError {
  kind = 'bundle';
}

/** The network gave no answer, and no copy is kept. */
export class NetworkError extends InputError {
  kind = 'network';
}

/** Nothing could be run or compared: a missing library or device, a crash, an empty comparison. */
export class NotRunError extends CaracalError {
  exitCode = 3;
  kind = 'not_run';
}

/** A computed value that is not a number: a finding, never a result. */
export class NumericError extends CaracalError {
  exitCode = 1;
  kind = 'not_run';
}

/** Another provider runs what the asked one was to run: a finding. */
export class PlacementError extends CaracalError {
  exitCode = 1;
  kind = 'not_run';
}

/** Somebody asked to stop. */
export class CancelledError extends CaracalError {
  exitCode = 130;
  kind = 'cancelled';

  constructor() {
    super('cancelled');
  }
}

/**
 * Throws where somebody has asked to stop.
 * @param {AbortSignal | undefined} signal
 */
export function checkCancelled(signal) {
  if (signal?.aborted) throw new CancelledError();
}

/**
 * A value as it is shown in a message: JSON, cut.
 * @param {unknown} value
 * @param {number} [most] characters
 */
export function shown(value, most = 60) {
  let text;
  try {
    text = typeof value === 'bigint' ? String(value) : JSON.stringify(value);
  } catch {
    text = undefined;
  }
  text ??= String(value);
  return [...text]
    .slice(0, most)
    .join('')
    .replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (c) => `\\u{${c.codePointAt(0)?.toString(16)}}`);
}
