/** What went wrong, as the kind and the sentence that the page shows. */

import { CaracalError } from '../lib/errors.mjs';

// How browsers and ONNX Runtime say that memory is short, each in its own words.
const NO_MEMORY =
  /out of memory|\bOOM\b|bad_alloc|alloc(?:ation)? failed|fail(?:ed|ure)? to (?:allocate|grow)|could not allocate|invalid (?:typed )?array (?:buffer )?length|array length must be/i;

/**
 * @param {unknown} error
 * @returns {{kind: string, message: string}} `kind`: of the library's error, `limit` where memory is short, or `internal`
 */
export function failureOf(error) {
  const said = error instanceof Error ? error.message : String(error);
  // The library's own limits say more than this can; what the runtime says in its errors does not.
  const told = error instanceof CaracalError && error.kind !== 'not_run';
  if (!told && isShortOfMemory(said)) {
    return {
      kind: 'limit',
      message:
        `There is not enough memory (${said.split('\n')[0].slice(0, 200)}). Close other pages and open the bundle again, ` +
        'or use a smaller bundle or one in fewer bits (caracal quantize).',
    };
  }
  if (error instanceof CaracalError) return { kind: error.kind, message: error.message };
  return { kind: 'internal', message: `Something unexpected happened: ${said}` };
}

/** Whether a browser's or the runtime's words mean that memory is short. @param {string} said */
export function isShortOfMemory(said) {
  return NO_MEMORY.test(said);
}
