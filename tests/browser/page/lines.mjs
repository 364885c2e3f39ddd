// Reads JSON lines, each a Markdown text; writes for each a JSON array of what three renderers of chat clients make of it.
import { createInterface } from 'node:readline';
import MarkdownIt from 'markdown-it';
import { marked } from 'marked';
import React from 'react';
import { renderToStaticMarkup } from 'react-dom/server';
import Markdown from 'react-markdown';
import rehypeRaw from 'rehype-raw';
import remarkGfm from 'remark-gfm';

const linkify = new MarkdownIt({ html: true, linkify: true });
for await (const line of createInterface({ input: process.stdin })) {
  const text = JSON.parse(line);
  const drawn = [
    () => linkify.render(text),
    () => marked.parse(text, { gfm: true }),
    () => renderToStaticMarkup(React.createElement(
      Markdown, { remarkPlugins: [remarkGfm], rehypePlugins: [rehypeRaw], urlTransform: (url) => url }, text))
      .replace(/^(<link rel="preload" as="image" href="[^"]*"\/>)+/, ''), // React's own hints for the images that follow
  ].map((draw) => {
    try { return draw(); } catch { return null; } // React refuses some tags that rehype lets through
  });
  process.stdout.write(JSON.stringify(drawn) + '\n');
}
