// The page of the browser test: draws one text with each renderer, as careless a client as there is.
import MarkdownIt from 'markdown-it';
import { marked } from 'marked';
import mermaid from 'mermaid';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { flushSync } from 'react-dom';
import Markdown from 'react-markdown';
import rehypeRaw from 'rehype-raw';
import remarkGfm from 'remark-gfm';

mermaid.initialize({ startOnLoad: false, securityLevel: 'loose' });
const box = (name) => {
  const element = document.createElement('section');
  element.id = name;
  document.body.append(element);
  return element;
};

window.show = async (text, cmark, html) => {
  document.body.replaceChildren();
  box('markdown-it').innerHTML = new MarkdownIt({ html: true, linkify: true }).render(text);
  box('marked').innerHTML = marked.parse(text, { gfm: true });
  flushSync(() => createRoot(box('react')).render(
    React.createElement(Markdown, { remarkPlugins: [remarkGfm], rehypePlugins: [rehypeRaw], urlTransform: (url) => url }, text)));
  box('cmark-gfm').innerHTML = cmark;
  box('html').innerHTML = html;
  let number = 0;
  for (const code of document.querySelectorAll('code.language-mermaid')) {
    try {
      const drawn = await mermaid.render('drawing' + number++, code.textContent);
      box('mermaid' + number).innerHTML = drawn.svg;
    } catch { /* a diagram that does not parse draws nothing */ }
  }
  const live = [];
  for (const element of document.querySelectorAll('[href],[src],[srcset],[poster],[action],[data],[background]')) {
    for (const { name, value } of element.attributes) {
      if (['href', 'src', 'srcset', 'poster', 'action', 'data', 'background', 'xlink:href'].includes(name)) live.push(value);
    }
  }
  return live;
};
window.ready = true;
