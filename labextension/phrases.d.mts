export interface Said {
  id: string;
  many?: string;
  line: number;
}

export interface Passed {
  text: string;
  line: number;
  start: number;
}

export interface Phrases {
  said: Said[];
  passed: Passed[];
}

export function phrasesIn(file: string, source: string): Phrases;
export function allPhrases(root?: string): (Phrases & { file: string })[];
export function catalogue(): string;
